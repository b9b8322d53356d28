# Reads an address that is not there.
# walls: none
# ended: killed
# status: -11
import ctypes

ctypes.string_at(0)
