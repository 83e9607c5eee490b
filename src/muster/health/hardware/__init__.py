"""What drivers and tools say about GPUs, links and ports: parsers of their text, and the judges of what they mean.

Each parser takes text and gives typed values; each judge takes those values and gives findings. Nothing here starts a
program, opens a file or imports torch.
"""
