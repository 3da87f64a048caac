"""The version of the package, in one place that the build reads without importing torch."""

__version__ = "0.1.0"
