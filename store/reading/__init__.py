"""What outside readers see: the manifest and the exported tables behind it, the SQL views over them, and the sandboxed reader."""
