"""What keeps a run small and whole: compaction, retention, sweeping, fsck, rebuild."""
