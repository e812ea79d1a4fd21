"""Routers, one file each: which replica a request goes to."""
