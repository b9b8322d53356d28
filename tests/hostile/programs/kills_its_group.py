# Sends SIGKILL to its process group.
# ended: killed
# status: -9
# walls: none
import os

os.kill(0, 9)
