"""Layers of real networks as cached builders: what plancache fills ahead of time, shows and measures with."""
