"""What a patch does inside attention, through transformers' attention registry: never by replacing a `forward`."""
