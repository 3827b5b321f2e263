"""What a run states: its records, and the rules that they follow."""
