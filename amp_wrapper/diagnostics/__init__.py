"""What happens inside a training, shown: numbers of each step, causes of overflow, reports on precision, a choice of level."""
