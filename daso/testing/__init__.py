"""What helps to test a training: faults that strike where they are told to."""
