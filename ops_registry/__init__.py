"""What an operator is: contracts, targets and registration. Imports torch only."""
