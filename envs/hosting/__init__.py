"""Run environments in processes, pools and servers."""
