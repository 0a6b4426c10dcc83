"""Studies: one file each, compute -> frozen result -> tidy table."""
