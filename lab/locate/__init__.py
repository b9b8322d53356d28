"""Location of a mismatch (`lockstep diagnose --locate`): the operator and the layer at which engine and trainer part."""
