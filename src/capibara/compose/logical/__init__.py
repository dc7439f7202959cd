"""Models as they are written: blocks, connections, and what is known of shapes, types and values.

Nothing here knows of backends, source code or arrays on devices: that is :mod:`capibara.compose.physical`.
"""
