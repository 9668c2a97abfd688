"""The nodes of a training in one process, bit for bit as ranks would train."""
