"""The rank processes of one host: started, watched, retained, ended."""
