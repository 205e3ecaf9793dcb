"""Write the table, the figures and the files of a comparison."""
