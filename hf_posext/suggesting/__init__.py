"""The parts of `suggest`: what is read off a live model, the rules, the trial of each choice, and measuring them."""
