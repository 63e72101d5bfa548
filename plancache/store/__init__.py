"""What is on disk. Knows nothing about cuDNN: bytes in, bytes out."""
