"""What DistributedDataParallel needs at 16-bit levels."""
