"""How many versions of a rank's snapshot a host's memory has room for: the ring's sizes, which the plan counts too."""

#: Slots of a rank's own ring where no copy is made: one being written, one complete.
OWN_SLOTS = 2
#: With copies: what is being copied, the newest, and one being written. While copies take longer than a step, a fourth
#: for the version that all peers hold (see ``train.state.snapshot``); it is reserved when that first happens.
COPIED_SLOTS = 3
MAX_SLOTS = 4
#: A peer's: the version that all peers hold, and the one that arrives.
PEER_SLOTS = 2
FETCHED_SLOTS = 1
