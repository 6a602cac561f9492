"""`Zero3Strategy` as Lightning sees it."""
