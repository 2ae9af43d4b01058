"""What reproduces the paper's tables: experiments that return records, and the figures drawn from them."""
