"""The command line `dflash-hub`, thin: every command calls a function of another room."""
