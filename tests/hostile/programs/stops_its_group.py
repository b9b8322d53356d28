# Sends SIGSTOP to its process group.
# ended: timeout
# walls: none
import os

os.kill(0, 19)
