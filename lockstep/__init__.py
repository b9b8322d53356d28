"""The importable name of Lockstep. Its packages are links to the folders beside this one."""
