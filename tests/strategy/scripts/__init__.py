"""Programs that the tests of launchers start in processes of their own."""
