"""Search spaces of neural architectures whose latencies have been published, as op tables made without a framework.

A search space has thousands of networks made of the same few blocks, so capturing each would take hours. Here each is
composed of `rows.Row`s, the very rows that capturing the network would give (tests/accuracy/test_spaces.py compares
them).
"""
