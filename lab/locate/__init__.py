"""Location of a mismatch (`lockstep diagnose --locate`): the operator and layer at which engine and trainer part."""
