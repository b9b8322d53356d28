"""Live page about runs (`lockstep watch`): a server on this machine that only reads"""
