"""The console command and its flags."""
