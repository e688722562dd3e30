"""Everything that imports mmengine: the optimizer wrappers, the hooks, and the changes to mmengine."""
