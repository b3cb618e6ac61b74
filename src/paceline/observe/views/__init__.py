"""What a person sees in the terminal while a run goes on."""
