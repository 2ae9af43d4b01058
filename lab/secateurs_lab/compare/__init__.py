"""Methods compared under one budget: rows, tables and figures."""
