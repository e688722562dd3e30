"""What ranks do in tests of several processes. Importing a module adds its scenarios to ``common.SCENARIOS``."""
