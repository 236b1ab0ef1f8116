"""What an engine is given to start ranks: its manifests, for as many ranks and with what settings one likes."""
