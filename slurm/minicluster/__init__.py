"""A SLURM cluster on one machine: hosts are namespaces, links have a rate, the daemons are real.

`scripts/minicluster` is the door. Standard library only, so that no virtual environment is needed.
Texts are in `text` and `rate`; `processes` and `state` are what there is; `start` makes and
removes it.

How it is cleaned up, whenever `up` was killed: the record, with a random token, is written before
anything else is made. Every process that is started outside carries the token in its command line
and is process 1 of namespaces of its own; the one link outside is named after it. Killing those
processes ends all others, and the kernel takes links, mounts and namespaces away with the last.
"""
