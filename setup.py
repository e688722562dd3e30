"""Everything about the package stands in pyproject.toml; this file is where the compiled ops will be declared."""

from setuptools import setup

setup()
