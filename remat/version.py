"""The version, as the installed distribution has it."""

from importlib.metadata import version

__version__ = version("remat")
