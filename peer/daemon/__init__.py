"""The daemon's side: its process, its sessions with scripts, its log and its history."""
