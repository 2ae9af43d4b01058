"""The lab beside secateurs: rivals and ancestors, comparisons, the paper's tables, networks and data sets to try methods on.

secateurs finds what is here by the entry points in pyproject.toml: commands, criteria, models and data sets by their names.
"""
