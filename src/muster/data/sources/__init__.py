"""The data sources that ship: one file for each type, registered in `muster.data.source_type`."""
