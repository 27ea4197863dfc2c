"""The checks of `diagnose`: what is said, rotary modules, tables, order, position off, and how a text is served."""
