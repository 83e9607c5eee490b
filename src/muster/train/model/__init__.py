"""The model: built on the meta device, sharded, filled with weights; attention, loss, adapters."""
