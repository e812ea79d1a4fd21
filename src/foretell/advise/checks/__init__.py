"""The rules, one file each; `foretell.advise.family` finds them. None imports another."""
