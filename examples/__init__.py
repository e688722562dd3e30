"""Models and data sets of the example configs. Not part of the installed package."""
