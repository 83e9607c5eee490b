"""The process of one GPU: forked warm, connected to its agent, training or running a script of the user's."""
