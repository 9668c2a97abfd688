"""The nodes of a training in one process, bit for bit, and emulated links between real nodes."""
