"""Integrations: agents at the gateway, sandboxes, tool servers, environments of other packages."""
