"""One extension of each group of Terrace."""
