"""Everything that touches cuDNN; nothing in here touches the cache's disk."""
