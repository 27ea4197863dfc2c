"""The checks of `diagnose`, by what they look at: statements, rotary modules, tables, a text, and how a text is served."""
