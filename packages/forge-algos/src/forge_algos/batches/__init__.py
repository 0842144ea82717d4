"""Arrays from a packer → checked packed rows, and the arguments of a forward on the device.

Files here import the package's own files and settings.
"""
